"""What the scripts beside this file end with: a digest of what they trained, for a comparison of two runs."""

import hashlib


def tell(*models):
    """Print a digest of all weights and buffers, bit by bit."""
    digest = hashlib.sha256()
    for model in models:
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
    print(f"weights {digest.hexdigest()}", flush=True)
