"""What a run left behind, as one page: read it, reckon with it, draw it. No daemon, store or GPU is asked.

`read` finds the files and makes values of them, `story` reckons (pure), `charts` draws, `page` and `text` tell.
"""
