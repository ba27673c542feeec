"""What all policies share: the interface, the common keys, the value head, word vocabularies, checkpoint folders."""
