"""What a run spends its time on, what a person sees of it, and pictures of its metrics."""
