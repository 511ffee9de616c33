"""What will be run, decided before anything runs: the policy, the schedule and the arms."""
