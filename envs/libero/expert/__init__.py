"""A scripted expert that picks objects up and puts them down."""
