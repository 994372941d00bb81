"""Hugging Face folders: fetched, converted, and read into models and tokenizers."""
