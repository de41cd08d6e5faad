class FusibleOperation:
    pass


class Sequential(FusibleOperation):
    pass
