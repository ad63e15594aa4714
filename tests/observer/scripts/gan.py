"""A GAN: two models, two optimizers, and two backward passes a batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from weights import tell

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.randn(80, 8)), batch_size=8, shuffle=True)
generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
discriminator = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()

for _ in range(2):
    for (real,) in loader:
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), 4))
        of_discriminator.zero_grad()
        criterion(discriminator(real), ones).backward()
        criterion(discriminator(fake.detach()), zeros).backward()
        of_discriminator.step()
        of_generator.zero_grad()
        criterion(discriminator(fake), ones).backward()
        of_generator.step()
tell(generator, discriminator)
