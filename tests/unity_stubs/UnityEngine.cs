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
        public static string streamingAssetsPath => "";
    }

    public static class Debug
    {
        public static void LogError(object message, Object context) { }
    }

    public sealed class SerializeField : Attribute { }
    public sealed class TextAreaAttribute : Attribute { }
    public sealed class DisallowMultipleComponent : Attribute { }
    public sealed class TooltipAttribute : Attribute { public TooltipAttribute(string text) { } }
    public sealed class MinAttribute : Attribute { public MinAttribute(float least) { } }
    public sealed class RangeAttribute : Attribute { public RangeAttribute(float least, float most) { } }
    public sealed class AddComponentMenu : Attribute { public AddComponentMenu(string path) { } }
}
