"""What operators are told that will happen now, in sentences.

The one idea: a question and its answer say the same of what is to come, so both are made of the same words, with or without a
daemon. It is cheap to import, because the command line asks first.
"""

from elasticrl.base.words import count
from elasticrl.contract.model import Verb


def promise(verb: Verb, job: str, node: str = "", *, before: bool = False) -> str:
    """What an operator is told that will happen now. `before`: the job was already what he wants it to be.

    >>> promise(Verb.PAUSE, "ppo"), promise(Verb.RESUME, "ppo", before=True)
    ('job ppo pauses at the next step; go on with: elasticrl resume', 'job ppo was not paused: nothing is changed')
    """
    match verb:
        case Verb.DRAIN:
            return f"{node} was asked to leave: it finishes its step, and the plan goes on without it"
        case Verb.ADMIT:
            return f"nothing keeps {node} out of the plan now"
        case Verb.PAUSE if before:
            return f"job {job} was paused already; go on with: elasticrl resume"
        case Verb.PAUSE:
            return f"job {job} pauses at the next step; go on with: elasticrl resume"
        case Verb.RESUME if before:
            return f"job {job} was not paused: nothing is changed"
        case Verb.RESUME:
            return f"job {job} goes on"
        case Verb.STOP:
            return f"job {job} {ending()}"


def ending(step: int = 0, unsaved: int = 0) -> str:
    """How a job ends that is stopped now, at its newest step; `unsaved`: so many steps of it no gang is there to save.

    >>> ending(166, 6)
    'ends on all nodes at step 160, which is committed; too few are here to save: the 6 steps since are in memory alone'
    >>> ending()
    'saves and ends on all nodes'
    """
    if not unsaved:
        return "saves and ends on all nodes"
    since = f"the {count(unsaved, 'step')} since {'is' if unsaved == 1 else 'are'} in memory alone"
    return f"ends on all nodes at step {step - unsaved:,}, which is committed; too few are here to save: {since}"


def let_go(node: str) -> str:
    """What is told of a drain of one that is gone already."""
    return f"{node} was gone already: nobody waits for it any more"


def absent(node: str) -> str:
    """What is told of one that may come back, and is not there."""
    return f"{promise(Verb.ADMIT, '', node)}, but it does not run: start elasticrl there, and it joins"
