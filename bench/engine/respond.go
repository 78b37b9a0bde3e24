package engine

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
)

// apiError is the error object of vLLM and OpenAI.
type apiError struct {
	Message string  `json:"message"`
	Type    string  `json:"type"`
	Param   *string `json:"param"`
	Code    int     `json:"code"`
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	b, err := json.Marshal(v)
	if err != nil {
		b, status = []byte(`{"error":{"message":"the answer cannot be encoded","type":"InternalServerError","param":null,"code":500}}`), http.StatusInternalServerError
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(b)
}

func writeError(w http.ResponseWriter, status int, kind, message string) {
	writeJSON(w, status, map[string]apiError{"error": {Message: message, Type: kind, Code: status}})
}

func badRequest(w http.ResponseWriter, message string) {
	writeError(w, http.StatusBadRequest, "BadRequestError", message)
}

// readJSON decodes a body of at most MaxBody bytes, or answers 400.
func readJSON(w http.ResponseWriter, r *http.Request, v any) bool {
	b, err := io.ReadAll(http.MaxBytesReader(w, r.Body, MaxBody))
	if err == nil {
		err = json.Unmarshal(b, v)
	}
	if err == nil {
		return true
	}
	if too, ok := errors.AsType[*http.MaxBytesError](err); ok {
		writeError(w, http.StatusRequestEntityTooLarge, "BadRequestError", too.Error())
		return false
	}
	badRequest(w, "the body is not the JSON that is expected here: "+err.Error())
	return false
}
