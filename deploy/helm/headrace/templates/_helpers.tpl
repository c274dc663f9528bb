{{- define "headrace.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name | trunc 30 | trimSuffix "-" }}
{{- else -}}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 30 | trimSuffix "-" }}{{- end -}}
{{- end -}}

{{- define "headrace.labels" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* An entry of workers over workerDefaults, as YAML: a list in values replaces as a whole. */}}
{{- define "headrace.worker" -}}
{{- mergeOverwrite (deepCopy .root.Values.workerDefaults) (deepCopy .given) | toYaml -}}
{{- end -}}

{{/* The served model's name, as the worker itself derives it. */}}
{{- define "headrace.served" -}}
{{- .servedModelName | default (.model | trimSuffix "/" | base | trimSuffix ".gguf" | trimSuffix ".GGUF" | lower) -}}
{{- end -}}

{{/* The queues of a worker group, joined by spaces. */}}
{{- define "headrace.queues" -}}
{{- if .queues }}{{ join " " .queues }}{{ else }}{{ include "headrace.served" . }}{{ end -}}
{{- end -}}

{{/* HEADRACE_REDIS_URL from a secret; with the bundled Redis the password alone is secret. */}}
{{- define "headrace.redisEnv" -}}
{{- if .Values.redis.existingSecret }}
- name: HEADRACE_REDIS_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.existingSecret }}
      key: {{ .Values.redis.existingSecretKey }}
{{- else }}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .Values.redis.passwordSecret | default (printf "%s-redis" (include "headrace.fullname" .)) }}
      key: {{ .Values.redis.passwordSecretKey }}
- name: HEADRACE_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "headrace.fullname" . }}-redis:6379/0
{{- end }}
{{- end -}}

{{- define "headrace.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* preStop + drain + room to flush, unregister and exit: the one place where it is said. */}}
{{- define "headrace.grace" -}}
{{- add .preStop .drain 15 -}}
{{- end -}}

{{/* Target per replica of one capacity type: with a share of the queue the target grows. */}}
{{- define "headrace.target" -}}
{{- $target := .worker.target -}}
{{- if eq .root.Values.autoscaling.metric "replicas" }}{{ $target = 1 }}{{ end -}}
{{- divf (float64 $target) (float64 .capacity.share) | printf "%.3f" -}}
{{- end -}}

{{/* Exporters read one Redis: the maximum over them first. Queues and kinds are then added. */}}
{{- define "headrace.query" -}}
{{- $queues := splitList " " (include "headrace.queues" .worker) -}}
{{- $matchers := printf "queue=\"%s\"" (first $queues) -}}
{{- if gt (len $queues) 1 -}}
{{- $matchers = printf "queue=~\"%s\"" (join "|" $queues | replace "." "\\\\.") -}}
{{- end -}}
{{- with .root.Values.autoscaling.namespaceLabel -}}
{{- $matchers = printf "%s,%s=\"%s\"" $matchers . $.root.Release.Namespace -}}
{{- end -}}
{{- if eq .root.Values.autoscaling.metric "tokens" -}}
sum(max by (queue, kind) (headrace_queue_outstanding_tokens{ {{- $matchers -}} }))
{{- else if eq .root.Values.autoscaling.metric "replicas" -}}
sum(max by (queue) (headrace_queue_replicas_required{ {{- $matchers -}} }))
{{- else -}}
sum(max by (queue) (headrace_queue_outstanding_jobs{ {{- $matchers -}} }))
{{- end -}}
{{- end -}}

{{/* What is refused before anything is written. The schema has refused single values already. */}}
{{- define "headrace.check" -}}
{{- if not (or .Values.redis.enabled .Values.redis.existingSecret) }}
{{- fail "there is no Redis: set redis.existingSecret, or redis.enabled" }}
{{- end }}
{{- $seen := dict }}
{{- range $given := .Values.workers }}
{{- $worker := include "headrace.worker" (dict "root" $ "given" $given) | fromYaml }}
{{- with $worker }}
{{- if hasKey $seen .name }}
{{- fail (printf "workers %s: the name is used twice" .name) }}
{{- end }}
{{- $_ := set $seen .name true }}
{{- $share := 0.0 }}
{{- range list .onDemand .spot }}
{{- if .enabled }}{{ $share = addf $share .share }}{{ end }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}
{{- fail (printf "workers %s: minReplicas %v is above maxReplicas %v" $worker.name .minReplicas .maxReplicas) }}
{{- end }}
{{- end }}
{{- if and (or .onDemand.enabled .spot.enabled) (or (lt $share 0.999) (gt $share 1.001)) }}
{{- fail (printf "workers %s: the shares of its enabled capacity types add up to %v; they must add up to 1" .name $share) }}
{{- end }}
{{- if and .weightsCache.hostPath .weightsCache.existingClaim }}
{{- fail (printf "workers %s: weightsCache is either a hostPath or an existingClaim" .name) }}
{{- end }}
{{- if and (eq $.Values.autoscaling.kind "hpa") (not $.Values.autoscaling.hpa.scaleToZeroDeclared) (semverCompare "<1.37-0" $.Capabilities.KubeVersion.Version) }}
{{- if or (and .onDemand.enabled (eq (int .onDemand.minReplicas) 0)) (and .spot.enabled (eq (int .spot.minReplicas) 0)) }}
{{- fail (printf "workers %s: minReplicas 0 with a plain HPA needs the HPAScaleToZero feature; set autoscaling.hpa.scaleToZeroDeclared if your cluster has it, or use keda" .name) }}
{{- end }}
{{- end }}
{{- if eq $.Values.autoscaling.kind "keda" }}
{{- if lt (int $.Values.autoscaling.keda.cooldownPeriod) (int (mul 2 (int .coldStartSeconds))) }}
{{- fail (printf "autoscaling.keda.cooldownPeriod %v is less than twice the cold start of workers %s (%v s)" $.Values.autoscaling.keda.cooldownPeriod .name .coldStartSeconds) }}
{{- end }}
{{- if and (eq $.Values.autoscaling.keda.trigger "metrics-api") (gt (len .queues) 1) }}
{{- fail (printf "workers %s: the metrics-api trigger reads one queue; use the prometheus trigger to add up %d" .name (len .queues)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
