"""ReFrame's settings for a machine without a batch system: one partition, whose jobs start in place, by mpirun.

For a cluster, copy this file and replace "local" by "slurm" (and "mpirun" by "srun"), as ReFrame's manual says.
"""

site_configuration = {
    "systems": [
        {
            "name": "any",
            "descr": "any machine, without a batch system",
            "hostnames": [".*"],
            "partitions": [
                {
                    "name": "default",
                    "scheduler": "local",
                    "launcher": "mpirun",
                    "environs": ["installed"],
                    "max_jobs": 1,  # two at once would disturb each other's times
                }
            ],
        }
    ],
    # commengine in the python that is first on PATH
    "environments": [{"name": "installed"}],
}
