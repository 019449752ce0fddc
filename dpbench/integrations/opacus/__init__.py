"""Run code written for Opacus with this engine: change one import.

    from dpbench.integrations.opacus import BatchMemoryManager, PrivacyEngine

    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0
    )
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

Opacus itself is needed only for its own layers, schedulers and model fixes.
"""

from dpbench.integrations.opacus.engine import BatchMemoryManager, PrivacyEngine
from dpbench.integrations.opacus.loaders import DPDataLoader
from dpbench.integrations.opacus.module import GradSampleHooks, GradSampleModule
from dpbench.integrations.opacus.optimizer import DPOptimizer

__all__ = [
    "BatchMemoryManager",
    "DPDataLoader",
    "DPOptimizer",
    "GradSampleHooks",
    "GradSampleModule",
    "PrivacyEngine",
]
