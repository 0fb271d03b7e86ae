"""A job as people see it: what `elasticrl status` and the incidents show. Pure, but for `past`, which keeps a key."""
