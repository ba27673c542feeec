"""World model: learns from real episodes what action chunks lead to, and lets the policy practise in that."""
