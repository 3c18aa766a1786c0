//go:build tools

// Names the commands to build, so that go.mod keeps what they need.
package tools

import (
	_ "helm.sh/helm/v3/cmd/helm"
)
