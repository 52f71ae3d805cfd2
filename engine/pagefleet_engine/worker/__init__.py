"""One device: persistent input buffers, the model's step, sampling."""
