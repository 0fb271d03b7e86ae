"""Teams of two that share a model: the same digests with one team and with two, replicated and under FSDP2, through a kill."""

from bench.gpu.bits import NCCL
from bench.gpu.say import Say, begin


def main(say: Say) -> None:
    import test_team

    one: dict[int, str] = {}
    with say.check("one team", on_card=NCCL):
        one = test_team.made(say.folder / "one", 1, "replicated")
    for strategy in ("replicated", "fsdp"):
        with say.check(f"two teams, {strategy}, a member killed", on_card=NCCL):
            assert test_team.made(say.folder / strategy, 2, strategy, kills=True) == one


if __name__ == "__main__":
    begin(main)
