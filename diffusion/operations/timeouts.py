"""Times of unattended runs in seconds that are not configured; `config/operations.py` has those that are."""

RENEWAL = 10.0
"""Interval at which a rank syncs its heartbeat for other hosts, and rank 0 renews the lease of the run."""

LEASE = 90.0
"""Time without a renewal after which a lease of another host has expired."""

VISIBLE = 70.0
"""Time in which other hosts see the lease of rank 0 in a shared folder: NFS caches attributes for up to 60 s."""

POLL = 0.5
"""Interval at which the supervisor reads the heartbeats."""

STACKS = 10.0
"""Wait for the stack traces of ranks that hang."""

EXIT = 300.0
"""Wait for the processes of ranks whose last heartbeats say that they have ended."""

STRAGGLERS = 40.0
"""Wait for ranks to end after their launcher, since they save a checkpoint then; and for a launcher after its ranks."""

KILL = 30.0
"""Wait for processes that got SIGKILL."""

SUPERVISOR_LOCK = 1.0
"""Wait for the lock of a run, which `runs.supervisor_of` holds for a moment."""

POST, LAST_POSTS = 10.0, 20.0
"""Wait for the answer to an event, and for those that are still to be posted at the end."""

JOINING = 60.0
"""Least wait of the doctor's ranks for each other: some still import when others are there."""

HASHING = 86400.0
"""Wait of the doctor's ranks while one hashes the data of its machine."""
