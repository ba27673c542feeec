"""The cluster: from a plan to supervised Ray actors. No other room imports Ray."""
