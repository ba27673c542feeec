"""The learner: data-parallel DeepSpeed ranks that update the policy on super-batches."""
