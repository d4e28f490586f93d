class SamplingOps:
    def log_probs(self, logits, rows):
        raise NotImplementedError

    def sample(self, log_probs, random):
        raise NotImplementedError

    def verify(self, target, draft, drafts, random, greedy):
        raise NotImplementedError

    def apply_token_bitmask(self, logits, bitmask, rows):
        raise NotImplementedError
