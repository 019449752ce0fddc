"""Private training in the loops of other libraries; each module needs its own, and nothing else does.

huggingface    transformers' Trainer
lightning      Lightning's Trainer
opacus         code that was written for Opacus
tutorials      four programs to read and to run
sharp_edges    what people step on, and what is said then

accelerate needs no module: `PrivacyEngine` takes what its `prepare` returns, and `prepare` takes what the engine made.
`optimizer.step(loss=losses)` is then the step, and no `accelerator.backward()`; schedulers step where `engine.stepped`,
and in several processes once with `Accelerator(step_scheduler_with_optimizer=False)`.
"""
