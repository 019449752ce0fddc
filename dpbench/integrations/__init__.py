"""Private training in other libraries' loops; only the module of a library needs that library.

huggingface    transformers' Trainer
lightning      Lightning's Trainer
opacus         code written for Opacus
tutorials      four programs to read and run
sharp_edges    common mistakes, and how each is caught

accelerate needs no module: `PrivacyEngine` accepts the results of its `prepare`, and `prepare` those of the engine.
Then call `optimizer.step(loss=losses)`, and no `accelerator.backward()`. Step schedulers only if `engine.stepped`; a
prepared one sees to that itself. In several processes create `Accelerator(step_scheduler_with_optimizer=False)`, or
each steps once for every process.

Nor does Lightning's Fabric. Leave model, optimizer and loader out of its `setup`, as the optimizer returned takes no
losses and the model insists on `fabric.backward()`; compute the losses in `fabric.autocast()`.
"""
