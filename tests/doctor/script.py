"""A training script as users write them, for the doctor to run."""

import argparse
import sys

import torch

if "--lightning" in sys.argv:
    import lightning.pytorch as pl
else:
    import pytorch_lightning as pl


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        loss = torch.nn.functional.cross_entropy(self.layer(x), y)
        self.log(f"val_{dataloader_idx}", loss)

    def test_step(self, batch, batch_idx):
        print("testing")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def __init__(self, loaders):
        super().__init__()
        self.loaders = loaders

    def setup(self, stage):
        self.rows = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(2, (8,)))

    def loader(self):
        return torch.utils.data.DataLoader(self.rows, batch_size=2)

    def train_dataloader(self):
        return self.loader()

    def val_dataloader(self):
        return [self.loader() for _ in range(self.loaders)]

    def test_dataloader(self):
        return self.loader()


def main():
    """Train, or whatever `--stage` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--loaders", type=int, default=1)
    parser.add_argument("--accelerator", default="ipu")
    parser.add_argument("--lightning", action="store_true")
    parser.add_argument("--clip", type=float)
    parser.add_argument("--stage", default="fit")
    args = parser.parse_args()
    print("arguments:", args.loaders)
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        devices=1,
        gradient_clip_val=args.clip,
        logger=False,
        enable_checkpointing=False,
    )
    if args.stage == "none":
        sys.exit(0)
    getattr(trainer, args.stage)(Net(), datamodule=Data(args.loaders))
    print("trained")


if __name__ == "__main__":
    main()
