"""Four programs to read, first line to last, and to run: no data is downloaded, and each takes minutes at most.

memorisation    fine-tune a language model with LoRA, and see what it keeps of a secret: transformers' Trainer
digits          train a vision model by Lightning
from_opacus     bring code that was written for Opacus over: one import first, then the engine itself
user_level      protect all that one person gave, not one record of it

Run one by its name: `python -m dpbench.integrations.tutorials.digits`.
"""
