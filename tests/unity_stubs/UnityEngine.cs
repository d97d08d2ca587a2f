// The little of Unity that bindings/unity uses, so that it can be compiled without Unity. It does nothing.

using System;

namespace UnityEngine
{
    public class Object
    {
        public string name { get; set; } = "";
    }

    public class MonoBehaviour : Object { }

    public static class Application
    {
        public static bool isFocused => true;
        public static string streamingAssetsPath => "";
        public static string persistentDataPath => "";
    }

    public static class Debug
    {
        public static void Log(object message) { }
        public static void LogWarning(object message) => Console.WriteLine(message);
        public static void LogError(object message, Object context) { }
    }

    public struct FrameTiming
    {
        public double gpuFrameTime;
    }

    public static class FrameTimingManager
    {
        public static void CaptureFrameTimings() { }

        /// <summary>What is measured; NaN: nothing.</summary>
        public static double gpuFrameTime = double.NaN;

        public static uint GetLatestTimings(uint numFrames, FrameTiming[] timings)
        {
            if (double.IsNaN(gpuFrameTime)) return 0;
            timings[0].gpuFrameTime = gpuFrameTime;
            return 1;
        }
    }

    public struct Rect
    {
        public Rect(float x, float y, float width, float height) { }
    }

    public static class Screen
    {
        public static int width => 1280;
        public static int height => 720;
    }

    public struct Vector3
    {
        public Vector3(float x, float y, float z) { }
    }

    public struct Color
    {
        public Color(float r, float g, float b) { }
    }

    public enum PrimitiveType { Sphere, Capsule, Cylinder, Cube, Plane, Quad }

    public class Transform : Object
    {
        public Vector3 position { get; set; }
        public Vector3 localScale { get; set; }
    }

    public class Material : Object
    {
        public Color color { get; set; }
    }

    public class Renderer : Object
    {
        public Material material { get; } = new Material();
    }

    public class GameObject : Object
    {
        public Transform transform { get; } = new Transform();
        public static GameObject CreatePrimitive(PrimitiveType type) => new GameObject();
        public T GetComponent<T>() where T : new() => new T();
    }

    public static class Mathf
    {
        public const float PI = 3.14159274f;
        public static float Sin(float f) => (float)Math.Sin(f);
    }

    public static class Time
    {
        public static float time => 0;
    }

    public static class GUILayout
    {
        public static void BeginArea(Rect screenRect) { }
        public static void EndArea() { }
        /// <summary>The label that was drawn first since it was null.</summary>
        public static string first;

        public static void Label(string text) => first = first ?? text;
        public static string TextField(string text) => text;
        public static bool Button(string text) => false;
        public static float HorizontalSlider(float value, float leftValue, float rightValue) => value;
    }

    public sealed class SerializeField : Attribute { }
    public sealed class TextAreaAttribute : Attribute { }
    public sealed class DisallowMultipleComponent : Attribute { }
    public sealed class TooltipAttribute : Attribute { public TooltipAttribute(string text) { } }
    public sealed class MinAttribute : Attribute { public MinAttribute(float least) { } }
    public sealed class RangeAttribute : Attribute { public RangeAttribute(float least, float most) { } }
    public sealed class AddComponentMenu : Attribute { public AddComponentMenu(string path) { } }
}
