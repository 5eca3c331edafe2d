"""`quill bench structured`: are answers valid, the same, and as fast as free ones?"""
