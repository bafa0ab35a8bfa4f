"""An IPU run logs what a CPU run logs: the same LightningModule, data order and micro-batches."""
