package prefix

// Holds tells whether the engine is known to hold a block, in any tier. known is
// false while its view may not be trusted: then nothing follows from it.
func (x *Index) Holds(engine string, block uint64) (holds, known bool) {
	e := x.engines[engine]
	if e == nil || e.state != trusted {
		return false, false
	}
	return x.holds(e, block), true
}
