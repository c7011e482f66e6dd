"""Training on top of tplayers: the commands, and the parts that they are made of."""

import sys

if sys.argv[:1] == ["-m"]:  # Python looks for the module of `python -m trainers.NAME`, whose imports take seconds
    from commengine.extras import say_what_is_missing
    from commengine.job_end import end_on_interrupt

    end_on_interrupt()
    say_what_is_missing("train")
