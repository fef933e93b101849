"""Whole training jobs in one process, under a scheduler that a seed decides: what can come first does, and what can fail does.

    python -m tests.simulate --seeds 1000             from seed 0 on
    python -m tests.simulate --seed 4711 --trace      one seed, and all that happened
    python -m tests.simulate --defects                planted defects, and the first seed that finds each

The same seed makes the same run, to the line of the trace. scheduler.py decides who goes on, drive.py, ranks.py and link.py are the hardware, job.py
is the job, its faults and what must hold, defects.py shows that a run can fail.
"""
