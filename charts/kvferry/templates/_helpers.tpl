{{- define "kvferry.name" -}}
{{- $name := .Release.Name | replace "." "-" }}
{{- if contains "kvferry" $name }}{{ $name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvferry" $name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "kvferry.account" -}}
{{- default (printf "%s-operator" (include "kvferry.name" .)) .Values.serviceAccount.name }}
{{- end }}

{{- define "kvferry.image" -}}
{{- with .Values.image }}
{{- if .digest }}{{ .repository }}@{{ .digest }}{{ else }}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}

{{- define "kvferry.selector" -}}
app.kubernetes.io/name: kvferry-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvferry.labels" -}}
{{ include "kvferry.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Rules of the operator in the namespaces that it manages. Alphabetical, one rule for each set of verbs. */}}
{{- define "kvferry.rules" -}}
- apiGroups: [""]
  resources: [configmaps, serviceaccounts]
  verbs: [create, get, list, patch, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, patch]
# The operator creates Secrets and replaces its pools' Secrets, but cannot read any.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, update]
- apiGroups: [""]
  resources: [services]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [apps]
  resources: [controllerrevisions, deployments]
  verbs: [create, delete, get, list, patch, watch]
# The operator needs these permissions to grant them to gateways.
- apiGroups: [discovery.k8s.io]
  resources: [endpointslices]
  verbs: [get, list, watch]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [create, delete, get, list, patch]
- apiGroups: [kvferry.dev]
  resources: [inferencepools]
  verbs: [list, watch]
- apiGroups: [kvferry.dev]
  resources: [inferencepools/status, poolrolescalers/status]
  verbs: [patch]
- apiGroups: [kvferry.dev]
  resources: [poolrolescalers]
  verbs: [create, delete, get, list, patch, watch]
# The operator needs these permissions to grant them to gateways of pools that scale to zero.
- apiGroups: [kvferry.dev]
  resources: [poolrolescalers/scale]
  verbs: [get, patch]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [create, delete, get, list, patch]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [rbac.authorization.k8s.io]
  resources: [rolebindings, roles]
  verbs: [create, get, list, patch, watch]
{{- end }}
