"""The privacy engine: any torch optimizer made private, by any backend that can record.

from dpbench import PrivacyEngine

engine = PrivacyEngine(model, batch_size=256, sample_size=len(data), epochs=3, max_grad_norm=1.0, target_epsilon=3)
engine.attach(optimizer)
for inputs, targets in engine.data_loader(data):
    optimizer.step(loss=F.cross_entropy(model(inputs), targets, reduction="none"))
print(engine.privacy_spent())
"""

from __future__ import annotations

from dpbench.engine.engine import PrivacyEngine
from dpbench.engine.errors import Misuse, PrivacyWarning
from dpbench.engine.spent import PrivacySpent

__all__ = ["Misuse", "PrivacyEngine", "PrivacySpent", "PrivacyWarning"]
