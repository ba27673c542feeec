"""The configuration of a run: schema, YAML files, overrides, and messages about all mistakes at once."""
