"""From a job's flags to those of its best plan, under the rules of a target; the solvers are in tuner/search."""
