"""What makes a training step take less GPU memory: activations in host memory, base weights in four bits."""
