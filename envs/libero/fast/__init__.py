"""LIBERO's physics and rendering at lower cost, with the same states and pixels bit for bit."""
