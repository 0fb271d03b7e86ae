"""What elasticrl says about itself: structured events and metrics, each name declared once with its meaning."""
