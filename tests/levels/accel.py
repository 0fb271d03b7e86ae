"""A loop with Accelerate: prepare, backward, save_state, and load_state of the newest one that is whole."""

import shutil

import torch
from accelerate import Accelerator
from steps import arguments, made
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    args = arguments().parse_args()
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 1000))
    rows = torch.randn(4096, 16, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    found = {int(path.name): path for path in args.save.iterdir() if path.name.isdecimal()}
    step = max(found, default=0)
    if step:
        accelerator.load_state(str(found[step]))
    over = False
    while not over and step < args.steps:
        for (batch,) in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            over = made(args, step) or step >= args.steps
            if step % args.every == 0:
                fresh = args.save / f"new-{step}"
                accelerator.save_state(str(fresh))
                accelerator.wait_for_everyone()
                if accelerator.is_main_process:  # it is there under its number only when it is whole
                    shutil.rmtree(args.save / str(step), ignore_errors=True)
                    fresh.rename(args.save / str(step))
            if over:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
