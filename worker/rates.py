"""How fast this worker works, measured from its own steps: what autoscaling calculates with."""


class ServiceRates:
    """Tokens a second of prefill and of decode, told apart although most steps do both.

    Least squares of `seconds = a * prompt + b * output` over the steps, older ones forgotten
    (half-life `half_life` busy seconds); the rates are 1/a and 1/b.
    """

    def __init__(self, half_life: float = 60.0) -> None:
        self._half_life = half_life
        self._pp = self._po = self._oo = self._ps = self._os = 0.0
        self._prompt = self._output = self._seconds = 0.0

    def observe(self, prompt: int, output: int, seconds: float) -> None:
        """One step: prompt tokens computed, tokens generated, wall time."""
        if seconds <= 0.0 or prompt + output == 0:
            return
        keep = 0.5 ** (seconds / self._half_life)
        self._pp = self._pp * keep + prompt * prompt
        self._po = self._po * keep + prompt * output
        self._oo = self._oo * keep + output * output
        self._ps = self._ps * keep + prompt * seconds
        self._os = self._os * keep + output * seconds
        self._prompt = self._prompt * keep + prompt
        self._output = self._output * keep + output
        self._seconds = self._seconds * keep + seconds

    @property
    def prefill(self) -> float:
        """Prompt tokens a second; 0 while unknown."""
        return self._solve()[0]

    @property
    def decode(self) -> float:
        """Generated tokens a second; 0 while unknown."""
        return self._solve()[1]

    def _solve(self) -> tuple[float, float]:
        if self._seconds <= 0.0:
            return 0.0, 0.0
        determinant = self._pp * self._oo - self._po * self._po
        if determinant > 1e-6 * self._pp * self._oo:
            a = (self._ps * self._oo - self._os * self._po) / determinant
            b = (self._os * self._pp - self._ps * self._po) / determinant
            if a > 0.0 and b > 0.0:
                return 1.0 / a, 1.0 / b
        # Steps that were all alike can't be told apart: each kind gets all of the time.
        return self._prompt / self._seconds, self._output / self._seconds
