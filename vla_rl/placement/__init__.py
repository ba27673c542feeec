"""Placement: what runs on which device. Pure functions of configuration, resources and measured costs."""
