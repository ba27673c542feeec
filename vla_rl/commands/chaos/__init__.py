"""`vla-rl chaos`: a run that is hurt at random moments, and a report of what each fault cost."""
