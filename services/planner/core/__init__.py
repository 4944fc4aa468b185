"""The planner's decisions, pure: ``planner`` puts together ``rounds``, which use everything below."""
