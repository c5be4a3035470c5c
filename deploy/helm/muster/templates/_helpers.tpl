{{- define "muster.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* Labels that never change: selectors are made of them. */}}
{{- define "muster.selector" -}}
app.kubernetes.io/name: muster
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- with .group }}
muster.dev/group: {{ . | quote }}
{{- end }}
{{- end }}

{{- define "muster.labels" -}}
{{ include "muster.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* metadata of an object: root, component, name, and optionally annotations and labels. */}}
{{- define "muster.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "muster.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $annotations := merge (dict) (.annotations | default dict) .root.Values.commonAnnotations }}
{{- with $annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Writes an object with a patch merged over it. */}}
{{- define "muster.patched" -}}
{{- $object := fromYaml .object }}
{{- if hasKey $object "Error" }}{{ fail (printf "%s: %s" .what $object.Error) }}{{ end }}
{{- toYaml (mergeOverwrite $object (deepCopy (.patch | default dict))) }}
{{- end }}

{{- define "muster.image" -}}
{{- $all := .root.Values.image }}
{{- $own := .image | default dict }}
{{- $repository := $own.repository | default (printf "%s-%s" $all.repository .kind) }}
{{- if $own.digest }}{{ printf "%s@%s" $repository $own.digest }}
{{- else }}{{ printf "%s:%s" $repository ($own.tag | default $all.tag | default .root.Chart.AppVersion) }}
{{- end }}
{{- end }}

{{- define "muster.container.security" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "muster.pod.security" -}}
runAsNonRoot: true
runAsUser: {{ .Values.user.uid }}
runAsGroup: {{ .Values.user.gid }}
fsGroup: {{ .Values.user.gid }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* Names of secrets: as the values say, or of those that cert-manager fills. Empty: none. */}}
{{- define "muster.secret.coordinator" -}}
{{ .Values.tls.coordinatorSecret | default (ternary (printf "%s-coordinator-tls" (include "muster.name" .)) "" .Values.tls.certManager.enabled) }}
{{- end }}
{{- define "muster.secret.worker" -}}
{{ .Values.tls.workerSecret | default (ternary (printf "%s-worker-tls" (include "muster.name" .)) "" .Values.tls.certManager.enabled) }}
{{- end }}
{{- define "muster.secret.metrics" -}}
{{ .Values.tls.metricsSecret | default (ternary (printf "%s-metrics-tls" (include "muster.name" .)) "" (and .Values.tls.certManager.enabled .Values.tls.certManager.metrics)) }}
{{- end }}
{{/* Of callers: what Prometheus shows where the metrics ask for it, and the client of `helm test`. */}}
{{- define "muster.secret.scrape" -}}
{{- $c := .Values.tls.certManager }}
{{- .Values.monitoring.scrape.tlsSecret | default (ternary (printf "%s-scrape-tls" (include "muster.name" .)) "" (and $c.enabled $c.metrics .Values.tls.metricsClients .Values.monitoring.scrape.enabled)) }}
{{- end }}
{{- define "muster.secret.test" -}}
{{ .Values.test.clientSecret | default (ternary (printf "%s-test-tls" (include "muster.name" .)) "" (and .Values.tls.certManager.enabled .Values.test.enabled)) }}
{{- end }}

{{/* Flags with which the metrics of a program have TLS. */}}
{{- define "muster.metrics.tls" -}}
- --metrics-tls-cert=/etc/muster/metrics-tls/tls.crt
- --metrics-tls-key=/etc/muster/metrics-tls/tls.key
{{- if .Values.tls.metricsClients }}
- --metrics-tls-ca=/etc/muster/metrics-tls/ca.crt
{{- end }}
{{- end }}

{{- define "muster.coordinator.address" -}}
{{ include "muster.name" . }}-coordinator.{{ .Release.Namespace }}.svc:7600
{{- end }}

{{- define "muster.probes" -}}
startupProbe:
  httpGet: {path: /startupz, port: metrics, scheme: {{ ternary "HTTPS" "HTTP" (ne (include "muster.secret.metrics" .root) "") }}}
  periodSeconds: 5
  failureThreshold: 90
livenessProbe:
  httpGet: {path: /livez, port: metrics, scheme: {{ ternary "HTTPS" "HTTP" (ne (include "muster.secret.metrics" .root) "") }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: metrics, scheme: {{ ternary "HTTPS" "HTTP" (ne (include "muster.secret.metrics" .root) "") }}}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{/* `own` over `defaults`, where false and 0 count too; of maps that both have each key by itself, but for free maps. */}}
{{- define "muster.over" -}}
{{- $result := deepCopy .defaults }}
{{- range $key, $value := .own }}
{{- if and (kindIs "map" $value) (has $key (list "image" "state" "rdma" "secrets" "scale" "patch")) }}
{{- $merged := deepCopy (index $result $key) }}
{{- range $k, $v := $value }}{{ $_ := set $merged $k $v }}{{ end }}
{{- $_ := set $result $key $merged }}
{{- else }}
{{- $_ := set $result $key $value }}
{{- end }}
{{- end }}
{{- toYaml $result }}
{{- end }}

{{- define "muster.worker.check" -}}
{{- $w := .worker }}
{{- if and (eq $w.kind "DaemonSet") (eq $w.state.type "claim") }}
{{- fail (printf "workers.%s.state.type: a DaemonSet has no claims; use hostPath or emptyDir" .group) }}
{{- end }}
{{- if and (eq (int $w.slots) 0) (eq (int $w.gpus) 0) }}
{{- fail (printf "workers.%s: slots and gpus are both 0, so no rank could run there" .group) }}
{{- end }}
{{- end }}

{{/* What Prometheus trusts and shows. All ports of metrics have the same name in their certificate. */}}
{{- define "muster.scrape.tls" -}}
tlsConfig:
  serverName: {{ .name }}
  ca: {secret: {name: {{ .secret | quote }}, key: ca.crt}}
  {{- if .shows }}
  cert: {secret: {name: {{ .secret | quote }}, key: tls.crt}}
  keySecret: {name: {{ .secret | quote }}, key: tls.key}
  {{- end }}
{{- end }}

{{/* An endpoint of a monitor, as far as its first relabelings: the labels of /targets instead of those of Kubernetes,
which the operator adds before these. */}}
{{- define "muster.scrape.endpoint" -}}
interval: {{ .root.Values.monitoring.scrape.interval }}
scheme: {{ ternary "https" "http" (ne .tls "") }}
{{- with .tls }}
{{ . }}
{{- end }}
relabelings:
  - {action: labeldrop, regex: container|endpoint|namespace|pod|service}
  - {targetLabel: cluster, replacement: {{ .root.Values.clusterId | quote }}}
  - {targetLabel: component, replacement: {{ .component }}}
{{- end }}
