"""What each node decides by itself: follow the plan, stand for office, suspect, leave."""
