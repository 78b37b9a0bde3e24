package engine

import (
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"

	"github.com/rollbus/rollbus/subjects/blockhash"
)

// Vocab is the number of token ids: each renders as a space and three letters
// of alphabet, and that text reads back as the same id.
const Vocab = 1 << 18

const alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"

const tokenBytes = 4

var letters = func() (t [256]int8) {
	for i := range t {
		t[i] = -1
	}
	for i := range len(alphabet) {
		t[alphabet[i]] = int8(i)
	}
	return t
}()

// Tokenize is the rule for text: a token is up to four bytes and ends before
// the next space. " abc" with three letters of the alphabet is the id that
// renders so; everything else is a hash of its bytes. A space always begins a
// token, so what is appended to a text leaves its tokens alone.
func Tokenize(dst []uint32, text string) []uint32 {
	for len(text) > 0 {
		n := 1
		for n < min(tokenBytes, len(text)) && text[n] != ' ' {
			n++
		}
		dst = append(dst, tokenOf(text[:n]))
		text = text[n:]
	}
	return dst
}

func tokenOf(s string) uint32 {
	if len(s) == tokenBytes && s[0] == ' ' {
		a, b, c := letters[s[1]], letters[s[2]], letters[s[3]]
		if a >= 0 && b >= 0 && c >= 0 {
			return uint32(a)<<12 | uint32(b)<<6 | uint32(c)
		}
	}
	return uint32(xxhash.Sum64String(s) % Vocab)
}

// AppendText renders tokens, four bytes each.
func AppendText(dst []byte, tokens []uint32) []byte {
	for _, t := range tokens {
		dst = append(dst, ' ', alphabet[t>>12&63], alphabet[t>>6&63], alphabet[t&63])
	}
	return dst
}

func text(tokens []uint32) string {
	return string(AppendText(make([]byte, 0, tokenBytes*len(tokens)), tokens))
}

// sequence generates output: a state folded over every token so far.
type sequence struct{ state uint64 }

// newSequence starts after a prompt. Model, LoRA, salt and seed set the state
// that the prompt's tokens are folded into.
func newSequence(ns uint64, seed int64, prompt []uint32) sequence {
	s := sequence{state: mix(ns ^ mix(uint64(seed)))}
	for _, t := range prompt {
		s.fold(t)
	}
	return s
}

func (s *sequence) fold(t uint32) { s.state = mix(s.state ^ (uint64(t)+1)*0x9e3779b97f4a7c15) }

// next is the next token, and whether it would be the last by chance 1/mean.
func (s *sequence) next(mean int) (t uint32, last bool) {
	t = uint32(s.state>>40) % Vocab
	last = mix(s.state)%uint64(mean) == 0
	s.fold(t)
	return t, last
}

// mix is the finalizer of splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// plan of an output: what generation will come to.
type plan struct {
	tokens int
	reason string // stop or length
	stop   any    // stop string, stop token id, or nil
	text   int    // bytes of text: shorter than the tokens' when a stop string ended it
}

// planOutput finds where a generation ends: at max_tokens (length), or before
// it (stop) at a stop token, a stop string, the named length, or, unless EOS is
// ignored, where the drawn end falls.
func planOutput(g *Generation, s sequence, mean int) plan {
	named := max(g.OutputTokens, 0)
	if g.TotalTokens > 0 {
		named = max(1, g.TotalTokens-len(g.Prompt))
	}
	draw := named == 0 && !g.IgnoreEOS
	most := g.MaxTokens
	if named > 0 {
		most = min(most, named)
	}
	end := plan{tokens: most, reason: "length", text: most * tokenBytes}
	if named > 0 && named < g.MaxTokens {
		end.reason = "stop"
	}
	if !draw && len(g.Stop) == 0 && len(g.StopTokenIDs) == 0 {
		return end
	}
	var tail []byte // enough text to find a stop string that ends in the newest token
	keep := 0
	for _, w := range g.Stop {
		keep = max(keep, len(w))
	}
	for i := range most {
		t, last := s.next(mean)
		n := i + 1
		if n < g.MinTokens {
			continue
		}
		if slices.Contains(g.StopTokenIDs, int64(t)) {
			return plan{tokens: n, reason: "stop", stop: int64(t), text: n * tokenBytes}
		}
		if keep > 0 {
			tail = AppendText(tail, []uint32{t})
			if len(tail) > keep+tokenBytes {
				tail = tail[len(tail)-keep-tokenBytes:]
			}
			if w, at := firstStop(g.Stop, string(tail)); at >= 0 {
				return plan{tokens: n, reason: "stop", stop: w, text: max(0, n*tokenBytes-len(tail)+at)}
			}
		}
		if draw && last && n < g.MaxTokens {
			return plan{tokens: n, reason: "stop", text: n * tokenBytes}
		}
	}
	return end
}

func firstStop(stops []string, s string) (word string, at int) {
	at = -1
	for _, w := range stops {
		if i := strings.Index(s, w); i >= 0 && (at < 0 || i < at) {
			word, at = w, i
		}
	}
	return word, at
}

// namer names the blocks that generation completes.
type namer struct {
	seq    sequence
	hash   *blockhash.Hasher
	block  int
	mean   int
	tokens []uint32 // prompt and output as far as generated here
	named  []uint64
}

func newNamer(ns uint64, g *Generation, s sequence, block, mean int) *namer {
	n := &namer{seq: s, hash: blockhash.New(ns, block), block: block, mean: mean, tokens: slices.Clip(g.Prompt)}
	n.named = n.hash.Append(nil, g.Prompt)
	return n
}

func (n *namer) name(i int) uint64 {
	for i >= len(n.named) {
		t, _ := n.seq.next(n.mean)
		n.tokens = append(n.tokens, t)
		n.named = n.hash.Append(n.named, []uint32{t})
	}
	return n.named[i]
}
