"""LIBERO's meshes and textures: where they are found, and placeholders if they are not."""
