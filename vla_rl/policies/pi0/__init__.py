"""π0 (arXiv:2410.24164): a vision-language model with an action expert that denoises action chunks by flow matching."""
