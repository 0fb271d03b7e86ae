"""Lightning's Trainer as a job of elasticrl: it tells its steps, keeps its state in memory, and goes on where its data stood.

    trainer = Trainer(..., callbacks=[elasticrl.lightning.Callback("checkpoints/leaving.ckpt", keep=True)])
    data = elasticrl.lightning.DataLoader(...)  # in place of torch's
    trainer.fit(model, data, ckpt_path=elasticrl.lightning.latest("checkpoints"))

Start reading at `callback`. docs/TRAINERS.md says what is gained and lost.
"""

from elasticrl.lightning.callback import Callback, latest
from elasticrl.lightning.loader import DataLoader

__all__ = ["Callback", "DataLoader", "latest"]
