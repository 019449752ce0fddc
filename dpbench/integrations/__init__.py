"""The engine in training loops that people already have; each module needs its framework, and nothing else does.

huggingface    transformers' Trainer
lightning      Lightning's Trainer

accelerate needs no module: `PrivacyEngine` takes what its `prepare` returns, and `prepare` takes what the engine made.
`optimizer.step(loss=losses)` is then the step, and no `accelerator.backward()`; schedulers step where `engine.stepped`,
and in several processes once with `Accelerator(step_scheduler_with_optimizer=False)`.
"""
