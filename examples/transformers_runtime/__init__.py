"""A second runtime for evoke-core: Hugging Face transformers with a bounded cache and recovery."""
