"""Four programs to read and run: no downloads, and minutes at most each.

memorisation    fine-tune a language model with LoRA by transformers' Trainer, and measure how it memorises a secret
digits          train a vision model by Lightning
from_opacus     port code written for Opacus: change one import first, then use the engine itself
user_level      protect all records of a person instead of a single one

Run one by its name: `python -m dpbench.integrations.tutorials.digits`.
"""
