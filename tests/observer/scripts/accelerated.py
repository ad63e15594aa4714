"""A loop by accelerate: what it prepared, its backward pass, gradients of two batches accumulated."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from weights import tell

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
loader = DataLoader(TensorDataset(torch.randn(96, 16), torch.randint(0, 4, (96,))), batch_size=8, shuffle=True)
held_out = DataLoader(TensorDataset(torch.randn(32, 16), torch.randint(0, 4, (32,))), batch_size=16)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader, held_out = accelerator.prepare(model, optimizer, loader, held_out)
for _ in range(2):
    model.train()
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    for inputs, targets in held_out:
        with torch.no_grad():
            logits = model(inputs)
        accelerator.gather_for_metrics((logits.argmax(1), targets))
    accelerator.save_model(model, "model")
tell(accelerator.unwrap_model(model))
