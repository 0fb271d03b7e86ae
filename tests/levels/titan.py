"""torchtitan's trainer with its Llama: FSDP2, and checkpoints by torch's DCP, or with --kept none: its state is in memory.

On CPUs it needs what is below `on_cpu`.
"""

from types import SimpleNamespace

import torch
import torch._dynamo
from kept import digest
from steps import arguments, digested, made
from torch.distributed.fsdp import FSDPModule


def on_cpu() -> None:
    """torchtitan takes a machine without an accelerator for one with CUDA, asks the device for its name and memory, and has no
    attention for CPUs: FlexAttention lacks the backward pass there.
    """
    import torchtitan.tools.utils as tools

    nothing = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats", "manual_seed", "manual_seed_all")
    tools.device_type, tools.get_local_device = "cpu", lambda: torch.device("cpu")
    tools.device_module = SimpleNamespace(
        **{name: lambda *_: None for name in nothing},
        current_device=lambda: 0, device_count=lambda: 1, get_device_name=lambda *_: "cpu", memory_stats=lambda *_: {},
        get_device_properties=lambda *_: SimpleNamespace(total_memory=1 << 30),
    )  # fmt: skip
    torch._dynamo.config.disable = True  # its masks are compiled, for half a minute
    from torchtitan.models.common.attention import FlexAttention

    def attend(q, k, v, *, enable_gqa, **_):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=enable_gqa), None

    FlexAttention.compiled_flex_attn = staticmethod(attend)


def main() -> None:
    asked = arguments()
    asked.add_argument("--kept", action="store_true")
    args = asked.parse_args()
    if not torch.accelerator.is_available():
        on_cpu()
    if not hasattr(
        torch.distributed, "set_timeout"
    ):  # torchtitan 0.3 calls it after its first step; torch 2.13 has none
        torch.distributed.set_timeout = lambda *_: None
    from datasets import Dataset
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.hf_datasets import DatasetConfig, text_datasets
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    from torchtitan.trainer import Trainer

    rows = Dataset.from_list([{"text": f"<user>{i}<answer>{str(i)[::-1]}"} for i in range(1000, 2000)])
    text_datasets.DATASETS["digits"] = DatasetConfig(
        path="", loader=lambda _: rows, sample_processor=lambda row: row["text"]
    )

    class Told(Trainer):
        def train_step(self, data_iterator):
            super().train_step(data_iterator)
            if args.kept:
                digested(args, self.step, digest(self.model_parts[0], next(iter(self.optimizers))))
            self.over = made(args, self.step)

        over = False

        def should_continue_training(self):
            return super().should_continue_training() and not self.over

    config = llama3_debugmodel()
    config.hf_assets_path, config.dump_folder = str(args.model), str(args.save)
    config.dataloader.dataset = "digits"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 2, 32, args.steps
    config.training.disable_cuda_graphs = True
    config.parallelism.spmd_backend = "partial_dtensor"
    config.validator.enable, config.debug.seed = False, 7
    config.checkpoint = CheckpointManager.Config(
        enable=not args.kept, interval=args.every, last_save_model_only=False, keep_latest_k=3
    )
    program = Told
    if args.kept:
        import elasticrl

        class Kept(elasticrl.titan.Kept, Told):
            pass

        program = Kept
    trainer = program(config)
    if not torch.accelerator.is_available():  # gloo has no sum that divides
        for part in trainer.model_parts:
            for each in part.modules():
                if isinstance(each, FSDPModule):
                    each.set_force_sum_reduction_for_comms(True)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
